"""Import path of the model families that slime <= 0.3.1 registered with ``mbridge``; kept so that imports still work.

Nothing is registered: slime maps weights with its own tables (``slime.backends.megatron_utils``), and a family that
mbridge does not know is unknown to it after this import too.
"""
