//! Where the expansion finds lock-runtime, and whose names its own names are.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::Path;

/// The path to what the expansion calls, where every path of it starts.
pub(crate) struct Runtime(Option<Path>);

impl Runtime {
    /// Under the path that the user gave, or else under the name of the crate.
    pub(crate) fn new(path: Option<Path>) -> Self {
        Self(path)
    }

    /// The path, for a call whose errors belong to `span`.
    pub(crate) fn at(&self, span: Span) -> TokenStream {
        match &self.0 {
            None => quote_spanned!(span=> ::lock_runtime::__rt),
            // A path of the user's has to be looked up where the user stands.
            Some(path) => {
                let rt = quote_spanned!(span=> ::__rt);
                quote!(#path #rt)
            }
        }
    }
}

/// Names of the expansion's own, shown to the user at `span`.
pub(crate) fn located_at(span: Span) -> Span {
    Span::mixed_site().located_at(span)
}
