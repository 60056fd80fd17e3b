"""Memory policy "offload" and `cache_host_layers`: what waits in host memory until it is used."""
