"""The page on a run: one document that reads its data from itself (`nanny report`) or over HTTP (`nanny ui`)."""
