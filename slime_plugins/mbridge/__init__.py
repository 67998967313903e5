"""Import path of the model families that slime <= 0.3.1 registered with ``mbridge``; kept so that imports still work.

Nothing is registered: slime maps the weights of these families with its own tables
(``slime.backends.megatron_utils.weights.maps``), and asks mbridge only about families without one.
"""
