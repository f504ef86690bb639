raise SystemExit("it ran")
