from importlib.util import find_spec

# The benchmark is no part of the installed package: it runs from a clone.
collect_ignore_glob = [] if find_spec("vitkit.tools.benchmark") else ["*"]
