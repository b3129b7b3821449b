"""``python -m omni_fsm`` is the command line."""

from omni_fsm.cli import main

main()
