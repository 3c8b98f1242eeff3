"""How times are taken and compared: two regimes, statistics, clocks, the health of the GPU, and the choice between finalists."""
