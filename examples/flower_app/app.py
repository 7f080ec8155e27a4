"""FedStrata as a Flower app: the digits, divided among the sites by the experiment's partition.

Sites with data of their own use ``client_app()`` without ``part_of_partition`` and say in their node's configuration
where it lies (``data-root="/data/scans"``).
"""

from fedstrata.deployment.flower import client_app, server_app

server = server_app(log=print)
client = client_app(part_of_partition=True)
