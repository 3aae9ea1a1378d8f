"""Build shards in worker processes: documents → segments → rows → arrays → files."""
