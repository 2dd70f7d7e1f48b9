"""The pass under every analysis: capture, reducers, groups of documents, processes."""
