"""Several engines behind one address: Ray Serve replicas, and a router that knows what each holds.

`overlap` and `ranking` know nothing of Ray; the rest needs the extra `kvweave[ray]`.
"""
