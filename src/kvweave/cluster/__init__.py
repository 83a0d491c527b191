"""Several engines behind one address: Ray Serve replicas, and a router that follows their caches.

`overlap` works without Ray; the other modules need the extra `ray`.
"""
