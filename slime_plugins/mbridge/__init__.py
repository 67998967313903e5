"""Where slime <= 0.3.1 registered model families with the package ``mbridge``; kept so that the import goes on working.

Nothing is registered: slime maps weights with tables of its own (``slime.backends.megatron_utils``), and a family that
mbridge does not know is unknown to it after this import too.
"""
