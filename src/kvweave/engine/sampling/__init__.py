"""Changes logits as requests ask and samples the next tokens."""
