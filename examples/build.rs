//! Compiles the proto file of `inventory`, without `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    #[cfg(feature = "inventory")]
    {
        let files = protox::compile(["inventory.proto"], ["proto"])?;
        tonic_prost_build::configure().compile_fds(files)?;
    }
    Ok(())
}
