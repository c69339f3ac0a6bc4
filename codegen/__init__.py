"""Code generation turns rank programs into Python source."""

if __name__ != "partc.codegen":  # a second import under another name would register twice
    raise ImportError("import partc.codegen, not codegen")
