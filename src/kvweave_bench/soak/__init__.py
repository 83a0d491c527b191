"""A real server under full load, faults and departures, every answer judged: `make soak`."""
