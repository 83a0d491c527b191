import sys
from pathlib import Path

# The scripted engine is shared with the server's tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
