"""The soak: a real server under full load and faults, with every answer judged; `make soak`."""
