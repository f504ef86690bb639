"""The command line tools; each also runs as `vitkit NAME`."""

import os

# Read by OpenMP when torch is imported, which no tool has done yet. By default its threads wait for each other in a
# loop, which fills the processors: where another program runs as well, each waits for one that does not get to run.
# quickstart/dino on two cores, steps a second, medians of two rounds beside one busy process and a load of 3 to 5 of
# others: 0.2 by default, 1.8 with PASSIVE, 2.1 with one thread; without that process 3.0, 3.7 and 4.6. One thread would
# leave the other processors idle where nothing else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# matplotlib takes its settings from a file of this name in the working folder before the user's own: among them are
# programs that it runs, such as LaTeX with `text.usetex`, and a folder of data may have come from anyone.
if os.path.lexists("matplotlibrc"):
    _folder = os.getcwd()
    os.chdir(os.path.dirname(__file__))
    try:
        import matplotlib  # noqa: F401
    finally:
        os.chdir(_folder)
