"""Other words for the same: donors nominated by meaning, for what alignment left over."""
