//! The path of lock-runtime in the expansion, and the hygiene of the expansion's names.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::Path;

/// The path of lock-runtime's support module. All paths of the expansion start with it.
pub(crate) struct Runtime(Option<Path>);

impl Runtime {
    /// Uses the path that the user gave, or else the name of the crate.
    pub(crate) fn new(path: Option<Path>) -> Self {
        Self(path)
    }

    /// Returns the import that the other paths need. The user's path is resolved there once, and
    /// its errors are shown there.
    pub(crate) fn import(&self) -> TokenStream {
        let Some(path) = &self.0 else {
            return TokenStream::new();
        };
        let rt = quote_spanned!(ends(path).1=> ::__rt as __lock_rt);
        quote!(use #path #rt;)
    }

    /// Returns the path for a call whose errors belong to `span`.
    pub(crate) fn at(&self, span: Span) -> TokenStream {
        match &self.0 {
            None => quote_spanned!(span=> ::lock_runtime::__rt),
            Some(_) => quote_spanned!(span=> __lock_rt),
        }
    }
}

/// Returns a span with the hygiene of the expansion, located at `span` for the user.
pub(crate) fn located_at(span: Span) -> Span {
    Span::mixed_site().located_at(span)
}

/// Returns the spans of the first and the last token. Stable macros cannot join spans, but the
/// compiler can.
pub(crate) fn ends(tokens: &impl ToTokens) -> (Span, Span) {
    let mut spans = tokens
        .to_token_stream()
        .into_iter()
        .map(|token| token.span());
    let start = spans.next().unwrap_or_else(Span::call_site);
    (start, spans.last().unwrap_or(start))
}
