"""The client app and the server app; both are fedet's, for this folder."""

from fedet.flower import client_app, server_app

client = client_app(__file__)
server = server_app(__file__)
