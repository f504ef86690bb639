"""Sets of small runs that differ in one part each; `vitkit ablate` trains them and writes table and plot."""
