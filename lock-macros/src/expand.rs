//! The expansion: the function as it was written, with its body behind a lock. The body stands in the output once.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::{
    Expr, ReturnType, Type,
    ext::IdentExt as _,
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_type_mut},
};

use crate::{
    args::{Args, OnBusy, OnLost},
    function::{AsyncBlock, Bindings, Function, Work, ends},
    key::Keys,
    runtime::{Runtime, located_at},
};

/// The locked function; on any mistake the item as it was, beside the errors.
pub(crate) fn expand(args: TokenStream, item: TokenStream) -> TokenStream {
    let function = syn::parse2::<Function>(item.clone());
    // What only the key names is unused without it.
    let unused = function.is_ok().then(|| quote!(#[allow(unused_variables)]));
    let error = match (function, syn::parse2::<Args>(args)) {
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
    let error = error.into_compile_error();
    if syn::parse2::<Expr>(item.clone()).is_ok() {
        // Nothing can stand beside an expression.
        return error;
    }
    // Without the item every use of it would be one more error, and an editor would not know it any longer.
    quote!(#unused #item #error)
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
        let name = function.sig.ident.unraw().to_string();
        let arguments = function.arguments();
        let Function {
            attrs,
            vis,
            sig,
            brace,
            inner_attrs,
            work,
        } = function;
        let work = match work {
            Work::Async(body) => self.locked(&name, &returned, arguments, brace, body),
            Work::Block(block) => {
                let AsyncBlock {
                    pin,
                    keywords,
                    arguments: bound,
                    brace,
                    body,
                } = *block;
                let locked = self.locked(&name, &returned, arguments, brace, body);
                let mut block = TokenStream::new();
                brace.surround(&mut block, |block| block.extend(quote!(#(#bound)* #locked)));
                match pin {
                    Some(pin) => quote!(#pin(#keywords #block)),
                    None => quote!(#keywords #block),
                }
            }
        };
        let mut block = TokenStream::new();
        brace.surround(&mut block, |block| {
            block.extend(quote!(#(#inner_attrs)* #work))
        });
        quote!(#(#attrs)* #vis #sig #block)
    }

    /// The body behind the lock: statements, and an expression of what the function returns.
    ///
    /// Client, key and spec are done with before the body captures its variables: `client = self.locks` borrows from what the
    /// body may move. The body is not handed to an async function, whose future would hold it twice.
    fn locked(
        &self,
        name: &str,
        returned: &Returned,
        arguments: Bindings,
        brace: Brace,
        body: TokenStream,
    ) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        let client = self.client(name);
        let request = self.request();
        let run = match self.args.on_lost {
            OnLost::Cancel => quote_spanned!(span=> #rt::cancel_on_loss),
            OnLost::Finish => quote_spanned!(span=> #rt::finish_despite_loss),
        };
        let (held, guard) = self.guard();
        let anchor = returned.anchor();
        // Whole: of a variable of which the body uses a field, or what is `Copy` of it, it would take no more than that, and the
        // rest would be dropped when the lock is free.
        let used = arguments.within(&body).map(|argument| {
            let span = located_at(argument.span());
            quote_spanned!(span=> let _ = &#argument;)
        });
        let used: TokenStream = used.collect();
        let busy = self.busy(returned);
        let refused = self.refused(returned);
        // Around a single expression not the user's own braces: the compiler would call them unnecessary.
        let is_single = !body
            .clone()
            .into_iter()
            .any(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ';'));
        let mut block = Group::new(Delimiter::Brace, body);
        block.set_span(if is_single {
            located_at(brace.span.join())
        } else {
            brace.span.join()
        });
        // The user's own span: of a block that a macro wrote, the compiler would not name the variables.
        let open = brace.span.open();
        let mut outer = Group::new(Delimiter::Brace, quote!(#guard #used #anchor #block));
        outer.set_span(open);
        let future = quote_spanned!(open=> async move #outer);
        let import = self.runtime.import();
        quote_spanned! {span=>
            #import
            let __client = #client;
            let __request = #request;
            let __outcome = match #rt::enter(__request).await {
                ::core::result::Result::Ok(__entered) => {
                    #held
                    #run(__entered, #future).await
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

    /// The client for the function of that `name`.
    fn client(&self, name: &str) -> TokenStream {
        match &self.args.client {
            None => {
                let span = Span::mixed_site();
                let rt = self.runtime.at(span);
                quote_spanned!(span=> #rt::ambient(::core::concat!(::core::module_path!(), "::", #name)))
            }
            Some(client) => {
                let client = client.cloned(|span| {
                    let rt = self.runtime.at(span);
                    quote_spanned!(span=> #rt::LockClient)
                });
                quote!(::core::result::Result::Ok(#client))
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
                quote_spanned!(span=> #rt::LockKeys::all([#(#keys),*], __client, #spec))
            }
            Keys::Expr(keys) => {
                // The user's own span, so that "`u64` is not a list of keys" points there and nowhere else.
                let span = keys.span();
                let rt = self.runtime.at(span);
                let client = Ident::new("__client", Span::mixed_site());
                quote_spanned!(span=> #rt::LockKeys::all(::core::convert::identity(#keys), #client, #spec))
            }
        }
    }

    /// What the body may call its lock: a statement before it, and one at its beginning.
    fn guard(&self) -> (TokenStream, TokenStream) {
        let Some(guard) = &self.args.guard else {
            return Default::default();
        };
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        // Of the same name, for errors that speak of it; unless it is the one other name that is in use here.
        let mut held = if guard == "__entered" {
            Ident::new("__held", guard.span())
        } else {
            guard.clone()
        };
        held.set_span(located_at(guard.span()));
        let borrow = quote_spanned!(guard.span()=> &#held);
        (
            quote_spanned!(span=> let #held = __entered.held();),
            quote_spanned!(span=> let #guard: &#rt::HeldLock = #borrow;),
        )
    }

    /// The arm for a lock that somebody else holds.
    fn busy(&self, returned: &Returned) -> TokenStream {
        let span = Span::mixed_site();
        let value = match &self.args.on_busy {
            None => return TokenStream::new(),
            Some(OnBusy::Skip(word)) => {
                let rt = self.runtime.at(*word);
                quote_spanned!(*word=> #rt::Skipped::skipped())
            }
            Some(OnBusy::Return(expr)) => returned.typed(quote!(#expr)),
        };
        let rt = self.runtime.at(span);
        // By `return`, so that a value of another type is what the compiler complains of. It may be a `return` itself.
        quote_spanned! {span=>
            ::core::result::Result::Err(__error) if #rt::is_busy(&__error) => {
                #[allow(unreachable_code, clippy::diverging_sub_expression, clippy::needless_return)]
                return #value;
            }
        }
    }

    /// Turns `__error` into what the function returns.
    fn refused(&self, returned: &Returned) -> TokenStream {
        let error = Ident::new("__error", Span::mixed_site());
        if let Some(map) = &self.args.map_err {
            // Not the user's own spans: the compiler would propose to wrap the function in `Err`.
            let (start, end) = ends(map);
            let start = located_at(start);
            let rt = self.runtime.at(start);
            let mut arguments = Group::new(Delimiter::Parenthesis, quote!(#map, #error));
            arguments.set_span(located_at(end));
            let ty = returned
                .inferred()
                .filter(|_| matches!(map, Expr::Closure(_)))
                .map(|ty| quote!(::<#ty>));
            return returned.typed(quote_spanned!(start=> #rt::map_err #ty #arguments));
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
    /// `None` if only the compiler can tell.
    ty: Option<Type>,
    ends: (Span, Span),
}

impl Returned {
    fn by(function: &Function) -> Self {
        let ends = match (function.returns(), &function.sig.output) {
            (Some(ty), _) => ends(ty),
            (None, ReturnType::Type(_, ty)) => ends(ty),
            (None, ReturnType::Default) => (function.sig.ident.span(), function.sig.ident.span()),
        };
        Self {
            ty: function.output(),
            ends,
        }
    }

    /// A `return` that never runs: the first one that the compiler sees, so that the body is held to the declared type and
    /// its errors stand where they stand without the attribute.
    fn anchor(&self) -> TokenStream {
        let Some(ty) = self.inferred() else {
            return TokenStream::new();
        };
        let (start, end) = self.ends;
        let mut call = Group::new(Delimiter::Parenthesis, TokenStream::new());
        call.set_span(end);
        let span = located_at(start);
        // The user's own span at both ends, so that "return type inferred to be" underlines the type.
        let mut closure = Group::new(
            Delimiter::Parenthesis,
            quote_spanned!(span=> || -> #ty { loop {} }),
        );
        closure.set_span(start);
        quote_spanned! {span=>
            #[allow(
                unreachable_code,
                clippy::diverging_sub_expression,
                clippy::empty_loop,
                clippy::needless_return,
                clippy::redundant_closure_call,
                clippy::unused_unit,
            )]
            if false {
                return #closure #call;
            }
        }
    }

    /// The expression, which the compiler holds to the type because the function declares it.
    fn typed(&self, expr: TokenStream) -> TokenStream {
        let Some(ty) = self.inferred() else {
            return expr;
        };
        quote_spanned!(Span::mixed_site()=> { let __value: #ty = #expr; __value })
    }

    /// The type as it can stand in a body.
    fn inferred(&self) -> Option<Type> {
        let mut ty = self.ty.clone()?;
        InferImplTrait.visit_type_mut(&mut ty);
        Some(ty)
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
