"""Build shards: documents → segments → rows → arrays → files, and the processes that run it."""
