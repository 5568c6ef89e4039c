//! x
mod args;
mod expand;
mod key;

/// x
#[proc_macro_attribute]
pub fn distributed_lock(args: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand::expand(args.into(), item.into()).into()
}
