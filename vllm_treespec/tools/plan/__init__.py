"""How the memory of a card is used, from configurations alone."""
