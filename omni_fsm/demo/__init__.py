"""The speech pipeline that ``omni-fsm demo`` runs: thinker, talker, code2wav, each in a process, on the public API alone."""
