"""An orchestrator that calls tools and other models of different price, and is rewarded as the task prefers."""
