"""Own data to a judged model: reads and splits annotations, chooses by timing, trains, reports."""
