//! The path of lock-runtime in the expansion, and the hygiene of the expansion's names.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{Path, spanned::Spanned as _};

use crate::{args::Given, function::ends};

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

impl Given {
    /// Expands to the value, with the type given at the span of the argument's name, so that a
    /// type error is reported there.
    ///
    /// If it were a plain function argument, an error would show that function to the user.
    pub(crate) fn value(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        quote_spanned!(Span::mixed_site()=> { let __value: #ty = #expr; __value })
    }

    /// Expands to a clone of the value. The expression is borrowed, and its temporaries live as
    /// long as in a call.
    pub(crate) fn cloned(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        // The user's own span, so that errors point to the expression.
        let given = Ident::new("__given", expr.span());
        let reference = quote_spanned!(self.name=> &);
        quote_spanned! {Span::mixed_site()=>
            match &(#expr) {
                #given => {
                    let __value: #reference #ty = #given;
                    ::core::clone::Clone::clone(__value)
                }
            }
        }
    }
}

/// Returns a span with the hygiene of the expansion, located at `span` for the user.
pub(crate) fn located_at(span: Span) -> Span {
    Span::mixed_site().located_at(span)
}
