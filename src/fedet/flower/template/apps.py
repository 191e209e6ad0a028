"""The two halves of the app; both are fedet's, told where this folder is."""

from fedet.flower import client_app, server_app

client = client_app(__file__)
server = server_app(__file__)
