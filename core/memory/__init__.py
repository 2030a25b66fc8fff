"""KV memory: the cache's layout, the page allocator, the pool and the byte budget."""
