"""What a ledger says: its record, statistics, text, charts, page, and the gate that compares two records."""
