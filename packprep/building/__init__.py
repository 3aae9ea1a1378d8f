"""ONE SHARD'S WORK: documents → segments → rows → arrays → files, and the processes that do it."""
