"""Step 6, finished runs -> comparison table and plot."""
