"""`python3 -m moetuner`."""

from moetuner.cli import main

raise SystemExit(main())
