"""`fedet ui`: a local web page that lists runs and shows them live; the only package here that imports Starlette and uvicorn.

`guard` decides who may ask for what, `folder` finds what is in the runs folder, `run_view` and `comparison_view` turn runs into
plain data for the templates, `charts` describes plots for the browser, `jobs` starts and stops runs, and `server` puts all of
that together.
"""
