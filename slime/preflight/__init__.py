"""Would this run work? ``plan`` computes, ``look`` tries."""
