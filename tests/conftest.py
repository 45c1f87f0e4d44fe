"""Settings of all tests."""

import torch

# The tests' tensors are small: threads only wait for each other.
torch.set_num_threads(1)
