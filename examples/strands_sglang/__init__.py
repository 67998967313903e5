"""Mathematics with an interpreter, by an agent of Strands Agents that records its tokens itself."""
