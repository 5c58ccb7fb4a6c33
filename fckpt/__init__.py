from fckpt.api import remat
