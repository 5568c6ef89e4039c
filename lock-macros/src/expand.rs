//! The expansion: the function as it was written, with its body behind a lock. The body stands in the output once.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{
    Type,
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_type_mut},
};

use crate::{
    args::{Args, OnBusy, OnLost},
    function::{AsyncBlock, Function, Work, ends},
    key::Keys,
    runtime::{Runtime, located_at},
};

/// The locked function; on any mistake the item as it was, beside the errors.
pub(crate) fn expand(args: TokenStream, item: TokenStream) -> TokenStream {
    let error = match (syn::parse2::<Function>(item.clone()), syn::parse2::<Args>(args)) {
        (Ok(function), Ok(args)) => match function.check(&args) {
            Ok(()) => return Expansion::new(args).function(function),
            Err(error) => error,
        },
        (Err(mut error), Err(more)) => {
            error.combine(more);
            error
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error,
    };
    // Without the item every use of it would be one more error, and an editor would not know it any longer.
    let error = error.into_compile_error();
    quote!(#item #error)
}

/// The arguments, on their way into a function.
struct Expansion {
    args: Args,
    runtime: Runtime,
}

impl Expansion {
    fn new(mut args: Args) -> Self {
        let runtime = Runtime::new(args.runtime.take());
        Self { args, runtime }
    }

    fn function(&self, function: Function) -> TokenStream {
        let returned = Returned::by(&function);
        let Function { attrs, vis, sig, brace, inner_attrs, work } = function;
        let work = match work {
            Work::Async(body) => self.locked(&returned, brace, body),
            Work::Block(block) => {
                let AsyncBlock { pin, keywords, arguments, brace, body } = *block;
                let locked = self.locked(&returned, brace, body);
                let mut block = TokenStream::new();
                brace.surround(&mut block, |block| block.extend(quote!(#(#arguments)* #locked)));
                match pin {
                    Some(pin) => quote!(#pin(#keywords #block)),
                    None => quote!(#keywords #block),
                }
            }
        };
        let mut block = TokenStream::new();
        brace.surround(&mut block, |block| block.extend(quote!(#(#inner_attrs)* #work)));
        quote!(#(#attrs)* #vis #sig #block)
    }

    /// The body behind the lock: statements, and an expression of what the function returns.
    ///
    /// Client, key and spec are done with before the body captures its variables: `client = self.locks` borrows from what the
    /// body may move. The body is not handed to an async function, whose future would hold it twice.
    fn locked(&self, returned: &Returned, brace: Brace, body: TokenStream) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        let client = self.client();
        let request = self.request();
        let run = match self.args.on_lost {
            OnLost::Cancel => quote_spanned!(span=> #rt::cancel_on_loss),
            OnLost::Finish => quote_spanned!(span=> #rt::finish_despite_loss),
        };
        let (held, guard) = self.guard();
        let anchor = returned.anchor();
        let busy = self.busy();
        let refused = self.refused(returned);
        // The user's line, but not the user's braces: the compiler would call them unnecessary.
        let mut block = Group::new(Delimiter::Brace, body);
        block.set_span(located_at(brace.span.join()));
        quote_spanned! {span=>
            let __client = #client;
            let __request = #request;
            let __outcome = match #rt::enter(__request).await {
                ::core::result::Result::Ok(__entered) => {
                    #held
                    #run(__entered, async move { #guard #anchor #block }).await
                }
                #busy
                ::core::result::Result::Err(__error) => ::core::result::Result::Err(__error),
            };
            match __outcome {
                ::core::result::Result::Ok(__returned) => __returned,
                ::core::result::Result::Err(__error) => #refused,
            }
        }
    }

    fn client(&self) -> TokenStream {
        match &self.args.client {
            None => {
                let span = Span::mixed_site();
                let rt = self.runtime.at(span);
                quote_spanned!(span=> #rt::ambient())
            }
            Some(client) => {
                let span = located_at(client.span());
                let rt = self.runtime.at(span);
                quote_spanned!(span=> #rt::client(&(#client)))
            }
        }
    }

    fn request(&self) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        let spec = self.args.spec.expand(&self.runtime);
        match &self.args.keys {
            Keys::One(key) => {
                let key = key.expand(&self.runtime);
                quote_spanned!(span=> #rt::one(__client, #key, #spec))
            }
            Keys::Several(keys) => {
                let keys = keys.iter().map(|key| key.expand(&self.runtime));
                quote_spanned!(span=> #rt::all(__client, [#(#keys),*], #spec))
            }
            Keys::Expr(keys) => {
                // The user's own span, so that "`u64` is no iterator" points there and nowhere else.
                let span = keys.span();
                let rt = self.runtime.at(span);
                let client = Ident::new("__client", Span::mixed_site());
                quote_spanned!(span=> #rt::all(#client, #keys, #spec))
            }
        }
    }

    /// What the body may call its lock: a statement before it, and one at its beginning.
    fn guard(&self) -> (TokenStream, TokenStream) {
        let Some(guard) = &self.args.guard else { return Default::default() };
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        (
            quote_spanned!(span=> let __held = __entered.held();),
            quote_spanned!(span=> let #guard: &#rt::HeldLock = &__held;),
        )
    }

    /// The arm for a lock that somebody else holds.
    fn busy(&self) -> TokenStream {
        let span = Span::mixed_site();
        let returned = match &self.args.on_busy {
            None => return TokenStream::new(),
            Some(OnBusy::Skip(word)) => {
                let rt = self.runtime.at(*word);
                quote_spanned!(*word=> #rt::Skipped::skipped())
            }
            Some(OnBusy::Return(expr)) => quote!(#expr),
        };
        let rt = self.runtime.at(span);
        // By `return`, so that a value of another type is what the compiler complains of. It may be a `return` itself.
        quote_spanned! {span=>
            ::core::result::Result::Err(__error) if #rt::is_busy(&__error) => {
                #[allow(unreachable_code, clippy::diverging_sub_expression, clippy::needless_return)]
                return #returned;
            }
        }
    }

    /// Turns `__error` into what the function returns.
    fn refused(&self, returned: &Returned) -> TokenStream {
        let error = Ident::new("__error", Span::mixed_site());
        if let Some(map) = &self.args.map_err {
            let span = located_at(map.span());
            let rt = self.runtime.at(span);
            return quote_spanned!(span=> #rt::map_err(#map, #error));
        }
        // The user's own spans, first token and last: a type that cannot hold the error is underlined, and nothing else.
        let (start, end) = returned.ends;
        let rt = self.runtime.at(start);
        let mut call = quote_spanned!(start=> #rt::FromLockError::);
        call.extend(quote_spanned!(end=> from_lock_error(#error)));
        call
    }
}

/// What the function returns, and where that is written.
struct Returned {
    /// `None` if an alias hides it.
    ty: Option<Type>,
    ends: (Span, Span),
}

impl Returned {
    fn by(function: &Function) -> Self {
        let ty = function.returns().cloned();
        let ends = match &ty {
            Some(ty) => ends(ty),
            None => (function.sig.ident.span(), function.sig.ident.span()),
        };
        let unit = || matches!(function.work, Work::Async(_)).then(|| syn::parse_quote!(()));
        Self { ty: ty.or_else(unit), ends }
    }

    /// A `return` that never runs: the first one that the compiler sees, so that the body is held to the declared type and
    /// its errors stand where they stand without the attribute.
    fn anchor(&self) -> TokenStream {
        let Some(mut ty) = self.ty.clone() else { return TokenStream::new() };
        let span = located_at(self.ends.0);
        InferImplTrait.visit_type_mut(&mut ty);
        quote_spanned! {span=>
            #[allow(
                unreachable_code,
                clippy::diverging_sub_expression,
                clippy::empty_loop,
                clippy::let_unit_value,
                clippy::let_with_type_underscore,
                clippy::needless_return,
            )]
            if false {
                let __returned: #ty = loop {};
                return __returned;
            }
        }
    }
}

/// `impl Trait` stands in no `let`; `_` leaves it to the body.
struct InferImplTrait;

impl VisitMut for InferImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if let Type::ImplTrait(_) = ty {
            *ty = syn::parse_quote!(_);
        } else {
            visit_type_mut(self, ty);
        }
    }
}

#[cfg(test)]
mod tests;
