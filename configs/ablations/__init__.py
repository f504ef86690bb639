"""Sets of small runs that each differ in one part; `vitkit ablate` trains them and writes a table and a plot."""
