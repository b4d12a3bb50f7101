"""Memory tiers: device and host behind one ledger, and what moves between them."""
