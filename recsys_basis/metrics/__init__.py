"""Step 5, logits -> numbers: AUC, log loss, NE, calibration; paired differences; bytes and rows/s."""
