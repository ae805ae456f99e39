"""How the answers about a run look, one file per question: lines and tables for people, plain data for JSON and csv."""
