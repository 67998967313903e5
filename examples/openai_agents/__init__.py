"""An agent of the OpenAI Agents SDK, in a process of its own, trained through the gateway and the rollout buffer."""
