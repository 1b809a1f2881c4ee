"""Other tools' files, read without torch: networks from nccl-tests, profiles from Kineto and Chakra traces."""
