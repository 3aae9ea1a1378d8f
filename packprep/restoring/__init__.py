"""The reading direction: arrays of a shard → segments → tokens → documents. Nothing that builds needs it."""
