"""What a step is made of: views of the batch, requests, trees that come back."""
