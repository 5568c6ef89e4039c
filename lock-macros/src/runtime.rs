//! Where the expansion finds lock-runtime, and whose names its own names are.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{Path, spanned::Spanned as _};

use crate::{args::Given, function::ends};

/// The path to what the expansion calls, where every path of it starts.
pub(crate) struct Runtime(Option<Path>);

impl Runtime {
    /// Under the path that the user gave, or else under the name of the crate.
    pub(crate) fn new(path: Option<Path>) -> Self {
        Self(path)
    }

    /// The statement that the others need: a path of the user's is looked up once, and its errors are shown there.
    pub(crate) fn import(&self) -> TokenStream {
        let Some(path) = &self.0 else {
            return TokenStream::new();
        };
        let rt = quote_spanned!(ends(path).1=> ::__rt as __lock_rt);
        quote!(use #path #rt;)
    }

    /// The path, for a call whose errors belong to `span`.
    pub(crate) fn at(&self, span: Span) -> TokenStream {
        match &self.0 {
            None => quote_spanned!(span=> ::lock_runtime::__rt),
            Some(_) => quote_spanned!(span=> __lock_rt),
        }
    }
}

impl Given {
    /// The value, which the compiler holds to the type because the argument's name says so: `ty` is written at its span.
    ///
    /// A mere argument of a function would show the user that function.
    pub(crate) fn value(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        quote_spanned!(Span::mixed_site()=> { let __value: #ty = #expr; __value })
    }

    /// A clone of the value, which stays where it is. What the expression borrows from lives as long as in a call.
    pub(crate) fn cloned(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        // Of the user's own span: what is wrong is theirs. They see no more of it than the place.
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

/// Names of the expansion's own, shown to the user at `span`.
pub(crate) fn located_at(span: Span) -> Span {
    Span::mixed_site().located_at(span)
}
