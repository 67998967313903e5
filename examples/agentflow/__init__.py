"""A planner that is trained in a flow of agents: tools, an executor and a verifier that are not."""
