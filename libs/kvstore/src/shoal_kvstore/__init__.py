"""What we add to an ``lmcache server``; loaded through its plugin points."""
